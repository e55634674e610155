-- name: EnterItem :execrows
INSERT INTO settlement_item (order_id, payout)
VALUES ($1, $2)
ON CONFLICT (order_id) DO NOTHING;

-- name: Credit :exec
UPDATE merchant
SET balance = balance + sqlc.arg(payout)::bigint
WHERE id = 1;
