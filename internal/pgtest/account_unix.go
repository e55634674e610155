//go:build unix

package pgtest

import (
	"errors"
	"os"
	"os/user"
	"strconv"
	"syscall"
)

// An account is the user who runs the server programs.
type account struct {
	name string
	cred *syscall.Credential // nil: the user of this process
}

// serverAccount returns the user of this process, or for root the first of the users that exist to hand over to:
// PostgreSQL refuses to run as root.
func serverAccount() (account, error) {
	if os.Geteuid() != 0 {
		return account{name: "user " + strconv.Itoa(os.Geteuid())}, nil
	}
	for _, name := range []string{"postgres", "_postgres", "nobody"} { // _postgres: macOS
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uidErr := strconv.ParseInt(u.Uid, 10, 64)
		gid, gidErr := strconv.ParseInt(u.Gid, 10, 64)
		if uidErr == nil && gidErr == nil {
			return account{"user " + name, &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}, nil
		}
	}
	return account{}, errors.New("PostgreSQL refuses to run as root, and there is no user postgres or nobody to run it")
}

// attr makes a child run as the account, in a session of its own: Ctrl-C in the terminal must not reach the server
// before its supervisor has cleaned up.
func (a account) attr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Credential: a.cred, Setsid: true}
}
