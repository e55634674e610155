// Package sqldrivers proves that the fence of jobrun holds in the ways in which
// services use PostgreSQL: database/sql with two drivers, sqlx, GORM, and the code
// that sqlc generates. It is a module of its own, so that their dependencies stay
// out of jobrun's.
package sqldrivers

//go:generate go run github.com/sqlc-dev/sqlc/cmd/sqlc@v1.31.1 generate
