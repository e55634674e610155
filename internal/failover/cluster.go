//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// nodes is how many PostgreSQL servers the cluster has.
const nodes = 3

// cluster is one etcd and the nodes that Patroni keeps.
type cluster struct {
	programs
	dir   string
	async bool
	ttl   int
	etcd  string // host and port
	nodes []*node
}

// node is a Patroni and its PostgreSQL.
type node struct {
	name           string
	dir            string
	postgres, rest string // host and port
	patroni        *exec.Cmd
}

// startCluster starts everything and waits until the cluster is whole.
func startCluster(ctx context.Context, p programs, dir string, c config) (*cluster, error) {
	cl := &cluster{programs: p, dir: dir, async: c.async, ttl: c.ttl}
	ports, err := freePorts(2 + 2*nodes)
	if err != nil {
		return nil, err
	}
	if err := cl.startEtcd(ports[0], ports[1]); err != nil {
		return nil, err
	}
	for n := range nodes {
		name := fmt.Sprintf("node%d", n+1)
		nd := &node{name: name, dir: filepath.Join(dir, name), postgres: ports[2+2*n], rest: ports[3+2*n]}
		if err := cl.folder(nd.dir); err != nil {
			return nil, err
		}
		text, err := json.MarshalIndent(cl.patroniConfig(nd), "", "  ") // which is YAML, too
		if err != nil {
			return nil, err
		}
		if err := os.WriteFile(filepath.Join(nd.dir, "patroni.yml"), text, 0o644); err != nil {
			return nil, err
		}
		cl.nodes = append(cl.nodes, nd)
		if err := cl.startPatroni(nd); err != nil {
			return nil, err
		}
	}
	_, err = cl.waitWhole(ctx)
	return cl, err
}

func (c *cluster) startEtcd(client, peer string) error {
	c.etcd = client
	dir := filepath.Join(c.dir, "etcd")
	if err := c.folder(dir); err != nil {
		return err
	}
	_, err := c.start(dir, "etcd.log", c.programs.etcd, "--name", "etcd", "--data-dir", filepath.Join(dir, "data"), "--log-level", "warn", "--logger", "zap",
		"--listen-client-urls", "http://"+client, "--advertise-client-urls", "http://"+client,
		"--listen-peer-urls", "http://"+peer, "--initial-advertise-peer-urls", "http://"+peer, "--initial-cluster", "etcd=http://"+peer)
	return err
}

// patroniConfig is a node's configuration.
func (c *cluster) patroniConfig(n *node) map[string]any {
	type m = map[string]any
	return m{
		"scope": "jobrun", "name": n.name,
		"restapi": m{"listen": n.rest, "connect_address": n.rest},
		"etcd3":   m{"host": c.etcd},
		"bootstrap": m{
			"dcs": m{
				"ttl": c.ttl, "loop_wait": 2, "retry_timeout": 3,
				"primary_start_timeout": 0, // rather fail over than wait for a crash recovery
				"synchronous_mode":      !c.async,
				"postgresql": m{
					"use_pg_rewind": true, "use_slots": true,
					"parameters": m{"max_connections": 200, "wal_log_hints": "on", "wal_keep_size": "256MB"},
				},
			},
			"initdb": []any{m{"encoding": "UTF8"}, m{"locale": "C"}, m{"auth": "trust"}, "data-checksums"},
		},
		"postgresql": m{
			"listen": n.postgres, "connect_address": n.postgres, "data_dir": filepath.Join(n.dir, "data"), "bin_dir": c.bin,
			"pgpass":         filepath.Join(n.dir, "pgpass"),
			"authentication": m{"superuser": m{"username": "postgres"}, "replication": m{"username": "replicator"}, "rewind": m{"username": "rewinder"}},
			"pg_hba":         []any{"host all all 127.0.0.1/32 trust", "host replication all 127.0.0.1/32 trust"},
			"parameters":     m{"unix_socket_directories": ""},
			"remove_data_directory_on_rewind_failure":     true,
			"remove_data_directory_on_diverged_timelines": true,
		},
	}
}

func (c *cluster) startPatroni(n *node) (err error) {
	n.patroni, err = c.start(n.dir, "patroni.log", c.patroni, filepath.Join(n.dir, "patroni.yml"))
	return err
}

// holdBack stops the primary's senders, as if the network to the other nodes were gone,
// and waits for that long.
func (c *cluster) holdBack(ctx context.Context, n *node, lag time.Duration) error {
	if lag == 0 {
		return nil
	}
	pids, err := n.senders(ctx)
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			return err
		}
	}
	if !sleep(ctx, lag) {
		return context.Cause(ctx)
	}
	return nil
}

// killServer kills all processes of a node's PostgreSQL; its Patroni lives and sees it.
func (c *cluster) killServer(_ context.Context, n *node) error {
	return killInside(filepath.Join(n.dir, "data"))
}

// killNode kills a node's PostgreSQL and its Patroni: nobody is left to tell.
func (c *cluster) killNode(_ context.Context, n *node) error {
	err := errors.Join(n.patroni.Process.Kill(), killInside(n.dir))
	_ = n.patroni.Wait()
	return err
}

// stopNode stops all of a node where it stands.
func (c *cluster) stopNode(_ context.Context, n *node) error {
	return signalInside(n.dir, syscall.SIGSTOP)
}

func (c *cluster) continueNode(n *node) error { return signalInside(n.dir, syscall.SIGCONT) }

// url is the connection string that finds the primary among the nodes.
func (c *cluster) url() string {
	var hosts []string
	for _, n := range c.nodes {
		hosts = append(hosts, n.postgres)
	}
	return "postgres://postgres@" + strings.Join(hosts, ",") + "/postgres?sslmode=disable&connect_timeout=2&target_session_attrs=read-write"
}

// freePorts finds ports of loopback that are free now, below those that Linux gives to
// outgoing connections: a server that comes back must find its port free again.
func freePorts(count int) (all []string, err error) {
	for range 1000 {
		var l net.Listener
		if l, err = net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", 15000+rand.IntN(17000))); err != nil {
			continue
		}
		defer l.Close() // held until all are found, so that they differ
		if all = append(all, l.Addr().String()); len(all) == count {
			return all, nil
		}
	}
	return nil, fmt.Errorf("no free ports: %w", err)
}

// sleep waits, unless ctx ends.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
