//go:build !(linux || darwin || freebsd || netbsd || openbsd || dragonfly)

package ops

import "os"

// terminal reports whether a file is a terminal, as far as it can be told.
func terminal(f *os.File) (columns int, ok bool) {
	info, err := f.Stat()
	return 0, err == nil && info.Mode()&os.ModeCharDevice != 0
}
