//go:build !linux

package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "failover needs Linux: it finds the processes to kill in /proc")
	os.Exit(2)
}
