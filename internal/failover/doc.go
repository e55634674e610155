// Command failover runs jobrun on a PostgreSQL cluster whose primary is killed again
// and again, stopped and moved, and checks afterwards that nothing that was acknowledged
// is lost or doubled:
//
//	go run ./internal/failover              20 kills, 4 stops, 4 switchovers, synchronous replication
//	go run ./internal/failover -async       what can be lost without it
//	go run ./internal/failover -lag 8s      replication stalls before a kill for longer than a statement may take
//
// Patroni keeps the cluster: three nodes and one etcd on loopback, in a temporary
// directory. Three worker processes reach it through one connection string with three
// hosts and all try the same keys; each writes what it was told to a file of its own,
// on disk before it goes on. At the end the files are held against the tables.
//
// At two kills of four the primary has sent nothing to the other nodes for a while (-lag),
// as when the network to them goes first: without synchronous replication, what was
// acknowledged meanwhile is lost; with it, nothing may be acknowledged. A node that is
// stopped (SIGSTOP) comes back when another one leads, and believes for a moment that it
// still does. A switchover is what a person asks Patroni for, before maintenance.
//
// It needs Linux, patroni, etcd and PostgreSQL's server programs.
package main
