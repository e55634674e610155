CREATE TABLE settlement_item (
  order_id bigint PRIMARY KEY, -- an order is settled once, whoever tries again
  payout   bigint NOT NULL
);

CREATE TABLE merchant (
  id      bigint PRIMARY KEY,
  balance bigint NOT NULL
);

INSERT INTO merchant (id, balance) VALUES (1, 0);
