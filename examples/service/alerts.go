package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
)

// attention is what /healthz and the alerts call a problem, besides runs that are
// stale or FAILED: a run that 01:00 should have started and that is not there at
// 02:00. Attempts that failed and were made good between two looks are not in it;
// those are WARN lines in the log.
var attention = &jobrun.AttentionOptions{DueBy: 2 * time.Hour}

// problem is a jobrun.Problem for people and programs, without its error text.
type problem struct {
	Kind          jobrun.ProblemKind `json:"kind"`
	Job           string             `json:"job,omitempty"`
	Key           string             `json:"job_key"`
	Date          jobrun.Date        `json:"business_date,omitzero"`
	Attempt       int                `json:"attempt"`
	Status        jobrun.Status      `json:"status,omitempty"`
	Since         time.Time          `json:"since"`
	NextAttemptAt time.Time          `json:"next_attempt_at,omitzero"`
}

func describe(p jobrun.Problem) problem {
	return problem{p.Kind, p.Job, p.Key, p.Date, p.Record.Attempt, p.Record.Status, p.Since, p.Record.NextAttemptAt}
}

// alert is what is posted. The key of the run names the incident. A post whose
// answer was lost is repeated with the same Idempotency-Key, by any instance: a
// receiver drops what it has seen.
type alert struct {
	Event string `json:"event"` // "problem" or "resolved"
	problem
	Error string `json:"error,omitempty"` // for the team; /healthz does not show it
}

// Tables of the alerts: what was told last about each run, so that a restart repeats
// nothing, and who is telling it, so that of several instances one does.
const alertTables = `
CREATE TABLE IF NOT EXISTS service_alert (
  job_key   text        PRIMARY KEY,
  event     text        NOT NULL,
  kind      text        NOT NULL,
  attempt   integer     NOT NULL,
  problem   jsonb       NOT NULL,
  told      boolean     NOT NULL,
  number    bigint      NOT NULL, -- of the alerts about this run
  turn_till timestamptz NOT NULL -- until then nobody else tells it
)`

// alerter posts each new problem once, and once that it is over.
type alerter struct {
	runner  *jobrun.Runner
	pool    *pgxpool.Pool
	webhook string
	client  *http.Client
	log     *slog.Logger
}

func newAlerter(runner *jobrun.Runner, pool *pgxpool.Pool, webhook string, log *slog.Logger) *alerter {
	return &alerter{runner, pool, webhook, &http.Client{Timeout: 10 * time.Second}, log}
}

// watch looks until ctx ends. It asks the database, not this process: nobody else
// would tell of a run whose process was killed.
func (a *alerter) watch(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for ctx.Err() == nil {
		if err := a.look(ctx); err != nil && ctx.Err() == nil {
			a.log.Error("alerts: the next look tries again", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

// look posts what has changed since anybody has told of it. What could not be posted
// is posted by the next look. An error says nothing about the problems that are open.
func (a *alerter) look(ctx context.Context) error {
	problems, err := a.runner.Attention(ctx, attention) // some may come although a job's calendar fails
	errs := []error{err}
	listed := map[string]bool{}
	for _, p := range problems {
		listed[p.Key] = true
		errs = append(errs, a.tell(ctx, alert{"problem", describe(p), p.Record.Error}))
	}
	if err != nil { // then what is not listed is not over
		return errors.Join(errs...)
	}
	open, err := a.open(ctx)
	errs = append(errs, err)
	for _, al := range open {
		if listed[al.Key] {
			continue
		}
		over, now, err := a.over(ctx, al.problem)
		if over {
			err = a.tell(ctx, alert{"resolved", now, ""})
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// open are the alerts whose problems were told and are not told to be over.
func (a *alerter) open(ctx context.Context) ([]alert, error) {
	rows, _ := a.pool.Query(ctx, `SELECT problem FROM service_alert WHERE event = 'problem' OR NOT told`)
	return pgx.CollectRows(rows, pgx.RowTo[alert])
}

// tell posts an alert unless it was told, or another instance is telling it. A row
// of an instance that ended in between is free again after a minute.
func (a *alerter) tell(ctx context.Context, al alert) error {
	body, err := json.Marshal(al)
	if err != nil {
		return err
	}
	var number int64
	err = a.pool.QueryRow(ctx, `
		INSERT INTO service_alert AS s (job_key, event, kind, attempt, problem, told, number, turn_till)
		VALUES ($1, $2, $3, $4, $5, false, 1, now() + interval '1 minute')
		ON CONFLICT (job_key) DO UPDATE
		SET event = excluded.event, kind = excluded.kind, attempt = excluded.attempt, problem = excluded.problem, told = false, turn_till = excluded.turn_till,
		  number = s.number + CASE WHEN (s.event, s.kind, s.attempt) IS DISTINCT FROM (excluded.event, excluded.kind, excluded.attempt) THEN 1 ELSE 0 END
		WHERE (s.event, s.kind, s.attempt) IS DISTINCT FROM (excluded.event, excluded.kind, excluded.attempt)
		  OR NOT s.told AND s.turn_till < now()
		RETURNING number`, al.Key, al.Event, string(al.Kind), al.Attempt, body).Scan(&number)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	posted := a.post(ctx, body, fmt.Sprintf("%s %d", url.QueryEscape(al.Key), number))
	_, err = a.pool.Exec(context.WithoutCancel(ctx), `
		UPDATE service_alert SET told = $3, turn_till = now()
		WHERE job_key = $1 AND number = $2`, al.Key, number, posted == nil)
	return errors.Join(posted, err)
}

// over reports whether a problem that is no longer listed is solved, and not just
// being worked on: a run that failed is not listed either while it is tried again,
// or while an approved re-run waits to be picked up.
func (a *alerter) over(ctx context.Context, p problem) (bool, problem, error) {
	rec, err := a.runner.Get(ctx, p.Key)
	if errors.Is(err, jobrun.ErrNotFound) {
		// Still no run: only an instance that judges the job's dates can tell that this one
		// is not due any more. During a deployment, others do not know the job yet.
		known := slices.ContainsFunc(a.runner.Scheduled(), func(job jobrun.Job) bool { return job.Name == p.Job })
		return known || p.Kind != jobrun.ProblemMissed, p, nil
	}
	if err != nil {
		return false, problem{}, err
	}
	beatsAgain := p.Kind == jobrun.ProblemStale && rec.Attempt == p.Attempt
	if rec.Status == jobrun.Running && !beatsAgain || rec.Status == jobrun.Failed && rec.PrunedAt.IsZero() {
		return false, problem{}, nil
	}
	p.Attempt, p.Status, p.NextAttemptAt = rec.Attempt, rec.Status, rec.NextAttemptAt
	return true, p, nil
}

func (a *alerter) post(ctx context.Context, body []byte, id string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, a.webhook, bytes.NewReader(body))
	if err != nil {
		return errors.New("alert webhook: not a URL")
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", id)
	response, err := a.client.Do(request)
	if err != nil {
		if wrapped := (*url.Error)(nil); errors.As(err, &wrapped) {
			err = wrapped.Err // the URL of a webhook often holds its password
		}
		return fmt.Errorf("alert webhook: %w", err)
	}
	defer response.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(response.Body, 64<<10)) // so that the connection can be used again
	if response.StatusCode >= 300 {
		return fmt.Errorf("alert webhook: %s", response.Status)
	}
	return nil
}

// startReceiver stands in for a chat or a pager: it prints what it is sent.
func startReceiver(out io.Writer) (url string, stop func(), err error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	server := &http.Server{ReadHeaderTimeout: 5 * time.Second, Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(io.LimitReader(r.Body, 64<<10))
		fmt.Fprintf(out, "alert received: %s\n", body)
	})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(listener) // until stop
	}()
	return "http://" + listener.Addr().String(), func() { _ = server.Close(); <-done }, nil
}
