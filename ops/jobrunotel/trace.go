// Package jobrunotel gives the attempts of jobrun spans of OpenTelemetry.
//
//	job := jobrun.Job{Name: "daily-settlement", Func: jobrunotel.Trace(settle)}
package jobrunotel

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/seed-ccb5b62c/jobrun"
)

const scope = "github.com/seed-ccb5b62c/jobrun/ops/jobrunotel"

// Trace returns f with a span for each attempt, from the global tracer provider: its
// context, and so what f calls with it, is in that span. The span has the attributes
// of jobrun's log lines: job, job_key, business_date, attempt, worker_id, trigger, and
// at the end status, items_processed and items_failed. An error of f is its error; a
// skip is none. The status is what f has returned: whether it could be recorded is
// told by what Runner.Run returns, and by the log.
//
// All attempts of a run are in one trace, whichever process executes them: its id is
// that of [TraceID]. They are children of one span that is never sent, so samplers
// that follow the parent take all of them. A span that is in the context of the call
// already, such as that of a request which started the run, is linked. Of a nil f it
// returns nil.
func Trace(f jobrun.Func) jobrun.Func {
	if f == nil {
		return nil // which every call with the job refuses
	}
	return func(ctx context.Context, run *jobrun.Run) (err error) {
		key := run.Key()
		opts := []trace.SpanStartOption{trace.WithSpanKind(trace.SpanKindConsumer), trace.WithAttributes(
			attribute.String("job", run.Job()), attribute.String("job_key", key), attribute.String("business_date", run.Date().String()),
			attribute.Int("attempt", run.Attempt()), attribute.String("worker_id", run.WorkerID()), attribute.String("trigger", string(run.Trigger())),
		)}
		if caller := trace.LinkFromContext(ctx); caller.SpanContext.IsValid() {
			opts = append(opts, trace.WithLinks(caller))
		}
		parent := sha256.Sum256([]byte("jobrun run\x00" + key))
		ctx = trace.ContextWithRemoteSpanContext(ctx, trace.NewSpanContext(trace.SpanContextConfig{
			TraceID: TraceID(key), SpanID: trace.SpanID(parent[:8]), TraceFlags: trace.FlagsSampled, Remote: true,
		}))
		ctx, span := otel.Tracer(scope).Start(ctx, run.Job(), opts...)
		returned := false
		defer func() {
			if v := recover(); v != nil {
				end(span, run, fmt.Errorf("panic: %v", v))
				panic(v)
			}
			if !returned {
				err = errors.New("the job ended its goroutine with runtime.Goexit")
			}
			end(span, run, err)
		}()
		err = f(ctx, run)
		returned = true
		return err
	}
}

// end ends the span of an attempt that has ended with this error.
func end(span trace.Span, run *jobrun.Run, err error) {
	status := jobrun.Succeeded
	if reason, skipped := jobrun.SkipReason(err); skipped {
		status = jobrun.Skipped
		span.SetAttributes(attribute.String("reason", reason))
	} else if err != nil {
		status = jobrun.Failed
		span.RecordError(err)
		span.SetStatus(codes.Error, err.Error())
	}
	processed, failed := run.Items()
	span.SetAttributes(attribute.String("status", string(status)), attribute.Int64("items_processed", processed), attribute.Int64("items_failed", failed))
	span.End()
}

// TraceID is the id of the trace that all attempts of a run are in, from its key: for
// a link in an alert, or to look a run up.
func TraceID(key string) trace.TraceID {
	sum := sha256.Sum256([]byte("jobrun trace\x00" + key))
	return trace.TraceID(sum[:16])
}
