//go:build linux

package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// member is a node as Patroni's REST API tells of it.
type member struct {
	Name, Role, State string
	Timeline          int
}

// members asks the nodes, until one answers, how the cluster is.
func (c *cluster) members(ctx context.Context) (all []member, err error) {
	for _, n := range c.nodes {
		if all, err = ask(ctx, n); err == nil {
			return all, nil
		}
	}
	return nil, err
}

func ask(ctx context.Context, n *node) ([]member, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+n.rest+"/cluster", nil)
	if err != nil {
		return nil, err
	}
	answer, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	var all struct{ Members []member }
	return all.Members, json.NewDecoder(answer.Body).Decode(&all)
}

// switchOver asks a leader's Patroni to hand over to another node, and waits for its answer.
func (c *cluster) switchOver(ctx context.Context, n *node) error {
	return post(ctx, "http://"+n.rest+"/switchover", fmt.Sprintf(`{"leader": %q}`, n.name))
}

// whole returns the leader, or why the cluster is not whole: a leader, all others
// streaming from it on its timeline and, unless replication is asynchronous, a
// synchronous one among them.
func (c *cluster) whole(ctx context.Context) (*node, error) {
	all, err := c.members(ctx)
	if err != nil {
		return nil, err
	}
	var leader member
	following, synchronous := 0, 0
	for _, m := range all {
		if m.Role == "leader" && m.State == "running" {
			leader = m
		}
	}
	for _, m := range all {
		if m.Name != leader.Name && m.Timeline == leader.Timeline && (m.State == "running" || m.State == "streaming") {
			following++
		}
		if m.Role == "sync_standby" {
			synchronous++
		}
	}
	if leader.Name == "" || following < nodes-1 || !c.async && synchronous == 0 {
		return nil, fmt.Errorf("the cluster is not whole: %v", all)
	}
	for _, n := range c.nodes {
		if n.name == leader.Name {
			return n, c.streams(ctx, n)
		}
	}
	return nil, fmt.Errorf("an unknown leader: %v", all)
}

// streams asks a primary itself whether it replicates to all others.
func (c *cluster) streams(ctx context.Context, n *node) error {
	streaming, synchronous := 0, 0
	err := n.query(ctx, `
		SELECT count(*), count(*) FILTER (WHERE sync_state IN ('sync', 'quorum'))
		FROM pg_stat_replication
		WHERE state = 'streaming' AND application_name LIKE 'node%'`, &streaming, &synchronous)
	switch {
	case err != nil:
		return err
	case streaming < nodes-1 || !c.async && synchronous == 0:
		return fmt.Errorf("the primary replicates to %d nodes, to %d of them synchronously", streaming, synchronous)
	}
	return nil
}

// senders are the processes of a primary that send to the other nodes.
func (n *node) senders(ctx context.Context) (pids []int, err error) {
	err = n.query(ctx, `SELECT coalesce(array_agg(pid), '{}') FROM pg_stat_replication`, &pids)
	return pids, err
}

// query reads one row from a node that must be the primary.
func (n *node) query(ctx context.Context, sql string, into ...any) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, "postgres://postgres@"+n.postgres+"/postgres?sslmode=disable&target_session_attrs=read-write")
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()
	return conn.QueryRow(ctx, sql).Scan(into...)
}

// waitWhole waits until the cluster is whole. After some changes of the leader, Patroni
// 3.0.2 finds the name of an earlier one in its key of the synchronous standby and never
// writes it again ("Synchronous replication key updated by someone else"): then that key
// is deleted. PostgreSQL has its synchronous standby all the time.
func (c *cluster) waitWhole(ctx context.Context) (leader *node, err error) {
	const patience = 3 * time.Minute
	helped := false
	for begun := time.Now(); time.Since(begun) < patience; {
		if leader, err = c.whole(ctx); err == nil {
			return leader, nil
		}
		if !helped && time.Since(begun) > time.Minute {
			helped = true
			if err := c.deleteSync(ctx); err != nil {
				return nil, err
			}
		}
		if !sleep(ctx, 200*time.Millisecond) {
			return nil, context.Cause(ctx)
		}
	}
	return nil, fmt.Errorf("after %s: %w", patience, err)
}

// deleteSync deletes Patroni's key of the synchronous standby.
func (c *cluster) deleteSync(ctx context.Context) error {
	key := base64.StdEncoding.EncodeToString([]byte("/service/jobrun/sync"))
	return post(ctx, "http://"+c.etcd+"/v3/kv/deleterange", fmt.Sprintf(`{"key": %q}`, key))
}

// post sends JSON and wants it to be accepted.
func post(ctx context.Context, url, body string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return err
	}
	answer, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if text, _ := io.ReadAll(io.LimitReader(answer.Body, 1000)); answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", url, answer.Status, text)
	}
	return nil
}

// waitWritable waits until a write succeeds through the connection string of the workers.
func (c *cluster) waitWritable(ctx context.Context) (err error) {
	const patience = 3 * time.Minute
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if err = c.write(ctx); err == nil {
			return nil
		}
		if !sleep(ctx, 50*time.Millisecond) {
			return context.Cause(ctx)
		}
	}
	return fmt.Errorf("nothing can be written after %s: %w", patience, err)
}

func (c *cluster) write(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second) // 2 for each host that is silent
	defer cancel()
	conn, err := pgx.Connect(ctx, c.url())
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, `INSERT INTO probe (at) VALUES (clock_timestamp())`)
	return errors.Join(err, conn.Close(ctx))
}
