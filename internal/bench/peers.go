package main

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"cirello.io/pglock"
	"github.com/dbos-inc/dbos-transact-golang/dbos"
	"github.com/go-co-op/gocron/v2"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/lib/pq" // pglock refuses other drivers
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// riverArgs is a job of River's, unique by its key until River removes it, which is a day
// after it was completed.
type riverArgs struct {
	Key string `json:"key" river:"unique"`
}

func (riverArgs) Kind() string { return "settlement" }

func (riverArgs) InsertOpts() river.InsertOpts {
	return river.InsertOpts{UniqueOpts: river.UniqueOpts{ByArgs: true}}
}

// newRiver is River with a client that inserts and works, at its defaults except
// for the number of workers. A run is over when its completion is in the database.
func newRiver(ctx context.Context, pool *pgxpool.Pool) (*side, error) {
	driver := riverpgxv5.New(pool)
	migrator, err := rivermigrate.New(driver, &rivermigrate.Config{Logger: silent})
	if err != nil {
		return nil, err
	}
	if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return nil, err
	}
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(context.Context, *river.Job[riverArgs]) error { return nil }))
	client, err := river.NewClient(driver, &river.Config{
		Logger: silent, Workers: workers, Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 500}},
	})
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	waiting := map[int64]chan struct{}{}
	done := func(id int64) chan struct{} { // whoever comes first makes it
		mu.Lock()
		defer mu.Unlock()
		if waiting[id] == nil {
			waiting[id] = make(chan struct{})
		}
		return waiting[id]
	}
	completed, cancel := client.SubscribeConfig(&river.SubscribeConfig{ChanSize: 1 << 17, Kinds: []river.EventKind{river.EventKindJobCompleted}})
	go func() {
		for event := range completed {
			close(done(event.Job.ID))
		}
	}()
	if err := client.Start(ctx); err != nil {
		return nil, err
	}
	insert := func(ctx context.Context, key string) (id int64, skipped bool, err error) {
		res, err := client.Insert(ctx, riverArgs{Key: key}, nil)
		if err != nil {
			return 0, false, err
		}
		return res.Job.ID, res.UniqueSkippedAsDuplicate, nil
	}
	wait := func(ctx context.Context, id int64) error {
		select {
		case <-done(id):
			mu.Lock()
			delete(waiting, id)
			mu.Unlock()
			return nil
		case <-time.After(time.Minute):
			return errors.New("a job of River's was not completed within a minute")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return &side{
		run: func(ctx context.Context, key string) error {
			id, skipped, err := insert(ctx, key)
			if err != nil || skipped {
				return err
			}
			return wait(ctx, id)
		},
		call: func(ctx context.Context, key string) error {
			_, _, err := insert(ctx, key)
			return err
		},
		bulk: func(ctx context.Context, n, workers int) slice {
			return func() (float64, error) {
				begin := time.Now()
				ids := make(chan int64, n)
				err := spreadOver(workers, n, func() error {
					id, _, err := insert(ctx, fresh())
					ids <- id
					return err
				})
				close(ids)
				for id := range ids {
					if err == nil {
						err = wait(ctx, id)
					}
				}
				return time.Since(begin).Seconds() / float64(n), err
			}
		},
		many: func(ctx context.Context, n int) slice {
			return func() (float64, error) {
				begin := time.Now()
				var ids []int64
				for start := 0; start < n; start += 1000 {
					params := make([]river.InsertManyParams, min(1000, n-start))
					for i := range params {
						params[i] = river.InsertManyParams{Args: riverArgs{Key: fresh()}}
					}
					results, err := client.InsertMany(ctx, params)
					if err != nil {
						return 0, err
					}
					for _, r := range results {
						ids = append(ids, r.Job.ID)
					}
				}
				for _, id := range ids {
					if err := wait(ctx, id); err != nil {
						return 0, err
					}
				}
				return time.Since(begin).Seconds() / float64(n), nil
			}
		},
		end: func() {
			cancel()
			_ = client.StopAndCancel(context.Background())
		},
	}, nil
}

var dbosApps atomic.Int64

// newDBOS is DBOS with a workflow whose ID is the key, and so many steps.
func newDBOS(ctx context.Context, pool *pgxpool.Pool, steps int) (*side, error) {
	app, err := dbos.NewContext(ctx, dbos.Config{AppName: fmt.Sprintf("bench-%d", dbosApps.Add(1)), SystemDBPool: pool, Logger: silent})
	if err != nil {
		return nil, err
	}
	nothing := func(context.Context) (string, error) { return "", nil }
	workflow := func(ctx dbos.Context, _ string) (string, error) {
		for range steps {
			if _, err := dbos.RunAsStep(ctx, nothing); err != nil {
				return "", err
			}
		}
		return "", nil
	}
	dbos.RegisterWorkflow(app, workflow, dbos.WithWorkflowName(fmt.Sprintf("settle%d", steps)))
	if err := dbos.Launch(app); err != nil {
		return nil, err
	}
	start := func(key string) (dbos.WorkflowHandle[string], error) {
		return dbos.RunWorkflow(app, workflow, key, dbos.WithWorkflowID(fmt.Sprintf("%s%s#%d", key, suffix, steps)))
	}
	return &side{
		run: func(_ context.Context, key string) error {
			handle, err := start(key)
			if err == nil {
				_, err = handle.GetResult()
			}
			return err
		},
		call: func(_ context.Context, key string) error {
			_, err := start(key)
			return err
		},
		end: func() { _ = dbos.Shutdown(app, 10*time.Second) },
	}, nil
}

// advisory locks a key of gocron's with a session lock of PostgreSQL.
type advisory struct{ pool *pgxpool.Pool }

type advisoryLock struct {
	conn *pgxpool.Conn
	key  string
}

func (a advisory) Lock(ctx context.Context, key string) (gocron.Lock, error) {
	conn, err := a.pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	var got bool
	if err := conn.QueryRow(ctx, `SELECT pg_try_advisory_lock(hashtextextended($1, 0))`, key).Scan(&got); err != nil || !got {
		conn.Release()
		return nil, cmp.Or(err, errors.New("locked by another"))
	}
	return advisoryLock{conn, key}, nil
}

func (l advisoryLock) Unlock(ctx context.Context) error {
	defer l.conn.Release()
	_, err := l.conn.Exec(ctx, `SELECT pg_advisory_unlock(hashtextextended($1, 0))`, l.key)
	return err
}

// newGocron is gocron with a locker: it excludes two executions at the same time,
// and records nothing.
func newGocron(_ context.Context, pool *pgxpool.Pool) (*side, error) {
	scheduler, err := gocron.NewScheduler(gocron.WithDistributedLocker(advisory{pool}))
	if err != nil {
		return nil, err
	}
	scheduler.Start()
	return &side{
		run: func(ctx context.Context, key string) error {
			ended := make(chan error, 1)
			_, err := scheduler.NewJob(
				gocron.OneTimeJob(gocron.OneTimeJobStartImmediately()),
				gocron.NewTask(func() {}),
				gocron.WithName(key),
				gocron.WithEventListeners(
					gocron.AfterJobRuns(func(uuid.UUID, string) { ended <- nil }),
					gocron.AfterLockError(func(_ uuid.UUID, _ string, err error) { ended <- err }),
				))
			if err != nil {
				return err
			}
			select {
			case err = <-ended:
			case <-ctx.Done():
				err = ctx.Err()
			}
			return err
		},
		end: func() { _ = scheduler.Shutdown() },
	}, nil
}

// newPglock is a lock of pglock's, taken and released: it records nothing.
func newPglock(_ context.Context, pool *pgxpool.Pool) (*side, error) {
	db, err := sql.Open("postgres", pool.Config().ConnString())
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(int(pool.Config().MaxConns))
	db.SetMaxIdleConns(int(pool.Config().MaxConns))
	client, err := pglock.New(db, pglock.WithLogger(nothingToSay{}), pglock.WithLeaseDuration(2*time.Minute), pglock.WithHeartbeatFrequency(30*time.Second))
	if err == nil {
		err = client.TryCreateTable()
	}
	if err != nil {
		return nil, err
	}
	return &side{
		run: func(ctx context.Context, key string) error {
			lock, err := client.AcquireContext(ctx, key, pglock.FailIfLocked())
			if err != nil {
				if strings.Contains(err.Error(), pglock.ErrNotAcquired.Error()) {
					return nil
				}
				return err
			}
			return client.ReleaseContext(ctx, lock)
		},
		end: func() { _ = db.Close() },
	}, nil
}

type nothingToSay struct{}

func (nothingToSay) Println(...any) {}
