// Package migrations holds the tables of jobrun as plain SQL files, for
// [github.com/seed-ccb5b62c/jobrun.Runner.Migrate] and for every other migrator.
//
// The files are numbered from 0001 without gaps, run forward only, and are
// never changed once released. Each creates its tables in the first schema of
// the search_path and records itself in batch_job_migration, so that it does
// not matter which tool applied it.
package migrations

import "embed"

// FS holds the SQL files, in its root directory.
//
//go:embed *.sql
var FS embed.FS
