package jobrunotel_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"testing"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
	"github.com/seed-ccb5b62c/jobrun/ops/jobrunotel"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// exporter keeps the spans of the global provider.
func exporter(t *testing.T) *tracetest.InMemoryExporter {
	t.Helper()
	e := tracetest.NewInMemoryExporter()
	before := otel.GetTracerProvider()
	otel.SetTracerProvider(sdktrace.NewTracerProvider(sdktrace.WithSyncer(e)))
	t.Cleanup(func() { otel.SetTracerProvider(before) })
	return e
}

func newRunner(t *testing.T) *jobrun.Runner {
	t.Helper()
	r, err := jobrun.New(pgtest.New(t).Pool, time.UTC, &jobrun.Options{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func attributes(s tracetest.SpanStub) map[string]string {
	all := map[string]string{}
	for _, a := range s.Attributes {
		all[string(a.Key)] = a.Value.String()
	}
	return all
}

var day = jobrun.MustParseDate("2026-09-15")

func TestAttemptsOfARunAreOneTrace(t *testing.T) {
	spans, r := exporter(t), newRunner(t)
	failure := errors.New("rates are missing")
	job := jobrun.Job{
		Name: "settlement", Retry: jobrun.Retry{MaxAttempts: 2, Backoff: func(int) time.Duration { return time.Nanosecond }},
		Func: jobrunotel.Trace(func(ctx context.Context, run *jobrun.Run) error {
			_, inner := otel.Tracer("test").Start(ctx, "query")
			inner.End()
			run.AddProcessed(3)
			run.AddFailed(1)
			if run.Attempt() == 1 {
				return failure
			}
			return nil
		}),
	}
	ctx, request := otel.Tracer("test").Start(t.Context(), "request")
	if _, err := r.RunDate(ctx, job, day); !errors.Is(err, failure) {
		t.Fatal(err)
	}
	request.End()
	if res, err := r.RetryDue(t.Context(), job); err != nil || len(res) != 1 {
		t.Fatal(res, err)
	}
	if _, err := r.RunDate(t.Context(), jobrun.Job{Name: "settlement", Func: jobrunotel.Trace(func(context.Context, *jobrun.Run) error { return jobrun.SkipRun("no trading") })}, day.AddDays(1)); err != nil {
		t.Fatal(err)
	}
	var attempts, queries []tracetest.SpanStub
	for _, s := range spans.GetSpans() {
		switch s.Name {
		case "settlement":
			attempts = append(attempts, s)
		case "query":
			queries = append(queries, s)
		}
	}
	if len(attempts) != 3 || len(queries) != 2 {
		t.Fatalf("%d attempts, %d queries", len(attempts), len(queries))
	}
	first, second, other := attempts[0], attempts[1], attempts[2]
	trace := first.SpanContext.TraceID()
	if trace != jobrunotel.TraceID("settlement:2026-09-15") || trace != second.SpanContext.TraceID() || trace == other.SpanContext.TraceID() {
		t.Errorf("traces %s, %s, %s", trace, second.SpanContext.TraceID(), other.SpanContext.TraceID())
	}
	if first.SpanContext.SpanID() == second.SpanContext.SpanID() || first.Parent.SpanID() != second.Parent.SpanID() {
		t.Error("the two attempts are not siblings")
	}
	for i, q := range queries {
		if q.Parent.SpanID() != attempts[i].SpanContext.SpanID() {
			t.Errorf("query %d is not within its attempt", i)
		}
	}
	if len(first.Links) != 1 || first.Links[0].SpanContext.TraceID() != request.SpanContext().TraceID() || len(second.Links) != 0 {
		t.Errorf("links %v, %v", first.Links, second.Links)
	}
	rec, err := r.Get(t.Context(), "settlement:2026-09-15")
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []map[string]string{
		{"job": "settlement", "job_key": "settlement:2026-09-15", "business_date": "2026-09-15", "attempt": "1", "trigger": "MANUAL", "status": "FAILED", "items_processed": "3", "items_failed": "1", "worker_id": rec.WorkerID},
		{"job": "settlement", "job_key": "settlement:2026-09-15", "attempt": "2", "trigger": "RETRY", "status": "SUCCEEDED"},
		{"job_key": "settlement:2026-09-16", "attempt": "1", "status": "SKIPPED", "reason": "no trading"},
	} {
		got := attributes(attempts[i])
		for name, value := range want {
			if got[name] != value {
				t.Errorf("attempt %d: %s is %q, want %q", i+1, name, got[name], value)
			}
		}
	}
	if first.Status.Code != codes.Error || first.Status.Description != failure.Error() || second.Status.Code != codes.Unset || other.Status.Code != codes.Unset {
		t.Errorf("%+v, %+v, %+v", first.Status, second.Status, other.Status)
	}
}

// However a job ends, its span ends, and the run as without it.
func TestSpanEndsWithEveryEnd(t *testing.T) {
	spans, r := exporter(t), newRunner(t)
	for i, f := range []jobrun.Func{
		func(context.Context, *jobrun.Run) error { panic("no rates") },
		func(context.Context, *jobrun.Run) error { runtime.Goexit(); return nil },
		func(ctx context.Context, _ *jobrun.Run) error { <-ctx.Done(); return ctx.Err() },
	} {
		spans.Reset()
		job := jobrun.Job{Name: fmt.Sprintf("job-%d", i), Timeout: 10 * time.Millisecond, Func: f}
		_, plain := r.RunDate(t.Context(), job, day)
		job.Func = jobrunotel.Trace(f)
		_, traced := r.RunDate(t.Context(), job, day.AddDays(1))
		var failed *jobrun.RunError
		if !errors.As(plain, &failed) || !errors.As(traced, &failed) {
			t.Fatalf("%v, %v", plain, traced)
		}
		if errors.As(plain, new(*jobrun.PanicError)) != errors.As(traced, new(*jobrun.PanicError)) {
			t.Errorf("%v became %v", plain, traced)
		}
		ended := spans.GetSpans()
		if len(ended) != 1 || ended[0].Status.Code != codes.Error || attributes(ended[0])["status"] != "FAILED" {
			t.Errorf("%d: %+v", i, ended)
		}
	}
}

func TestNoFunctionStaysNone(t *testing.T) {
	var invalid *jobrun.InvalidError
	if err := (jobrun.Job{Name: "settlement", Func: jobrunotel.Trace(nil)}).Validate(); !errors.As(err, &invalid) {
		t.Error(err)
	}
}
