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
	"time"

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

// alert is what is posted. The key of the run names the incident. Every instance
// posts, and one that was restarted posts what is still open again: a receiver
// drops what it has seen with the same job_key, event, kind and attempt.
type alert struct {
	Event string `json:"event"` // "problem" or "resolved"
	problem
	Error string `json:"error,omitempty"` // for the team; /healthz does not show it
}

// alerter posts each new problem once, and once that it is over.
type alerter struct {
	runner  *jobrun.Runner
	webhook string
	client  *http.Client
	log     *slog.Logger
	open    map[string]jobrun.Problem // posted and not over, by key
}

func newAlerter(runner *jobrun.Runner, webhook string, log *slog.Logger) *alerter {
	return &alerter{runner, webhook, &http.Client{Timeout: 10 * time.Second}, log, map[string]jobrun.Problem{}}
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

// look posts what has changed. What could not be posted counts as not seen, so the
// next look posts it. An error says nothing about the problems that are open.
func (a *alerter) look(ctx context.Context) error {
	problems, err := a.runner.Attention(ctx, attention)
	if err != nil {
		return err
	}
	var errs []error
	listed := map[string]bool{}
	for _, p := range problems {
		listed[p.Key] = true
		if known, ok := a.open[p.Key]; ok && known.Kind == p.Kind && known.Record.Attempt == p.Record.Attempt {
			continue
		}
		if err := a.post(ctx, alert{"problem", describe(p), p.Record.Error}); err != nil {
			errs = append(errs, err)
			continue
		}
		a.open[p.Key] = p
	}
	for key, p := range a.open {
		if listed[key] {
			continue
		}
		over, now, err := a.over(ctx, p)
		if over {
			err = a.post(ctx, alert{"resolved", now, ""})
		}
		switch {
		case err != nil:
			errs = append(errs, err)
		case over:
			delete(a.open, key)
		}
	}
	return errors.Join(errs...)
}

// over reports whether a problem that is no longer listed is solved, and not just
// being worked on: a run that failed is not listed either while it is tried again,
// or while an approved re-run waits to be picked up.
func (a *alerter) over(ctx context.Context, p jobrun.Problem) (bool, problem, error) {
	rec, err := a.runner.Get(ctx, p.Key)
	if err != nil && !errors.Is(err, jobrun.ErrNotFound) {
		return false, problem{}, err
	}
	beatsAgain := p.Kind == jobrun.ProblemStale && rec.Attempt == p.Record.Attempt
	if rec.Status == jobrun.Running && !beatsAgain || rec.Status == jobrun.Failed && rec.PrunedAt.IsZero() {
		return false, problem{}, nil
	}
	p.Record = rec
	return true, describe(p), nil
}

func (a *alerter) post(ctx context.Context, al alert) error {
	body, err := json.Marshal(al)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, a.webhook, bytes.NewReader(body))
	if err != nil {
		return errors.New("alert webhook: not a URL")
	}
	request.Header.Set("Content-Type", "application/json")
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
