//go:build !unix

package pgtest

import (
	"errors"
	"syscall"
)

type account struct{ name string }

func serverAccount() (account, error) {
	return account{}, errors.New("starting a PostgreSQL works on Linux, macOS and other Unix systems only; set JOBRUN_TEST_DATABASE_URL to a server that is already running")
}

func (account) attr() *syscall.SysProcAttr { return nil }
