// Command torture runs jobrun against everything that can go wrong, and checks
// afterwards that none of its promises was broken:
//
//	go run ./internal/torture              two minutes, a seed of its own
//	go run ./internal/torture -time 30m -seed 7
//	go run ./internal/torture -mutants all      what the check is worth
//
// Worker processes run jobs of several kinds on a PostgreSQL of the command's own,
// each behind a proxy that breaks its connections. Processes are killed, stopped and
// replaced, the server is killed and restarted, people act on what they saw a moment
// ago, other programs and hands change rows with plain SQL. Package checker reads what
// came of it; it shares no code with the library.
//
// It needs PostgreSQL's server programs and a Unix system (signals).
package main
