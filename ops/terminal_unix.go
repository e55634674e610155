//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package ops

import (
	"os"
	"syscall"
	"unsafe"
)

// terminal reports whether a file is a terminal, and its columns; 0: it does not say.
func terminal(f *os.File) (columns int, ok bool) {
	var size struct{ rows, columns, x, y uint16 }
	_, _, failed := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), syscall.TIOCGWINSZ, uintptr(unsafe.Pointer(&size)))
	return int(size.columns), failed == 0
}
