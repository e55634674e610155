// Package migrators proves that widely used migrators can apply the SQL files of
// jobrun as they are. It is a module of its own, so that their dependencies stay
// out of jobrun's.
package migrators
