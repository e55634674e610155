//go:build !unix

package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "torture needs a Unix system: it stops and kills processes with signals")
	os.Exit(2)
}
