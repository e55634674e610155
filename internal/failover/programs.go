//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// programs are the programs of a cluster, and who runs them.
type programs struct {
	patroni, etcd string
	bin           string              // the directory of PostgreSQL's server programs
	account       *syscall.Credential // nil: the user of this process
}

// findPrograms looks for everything that the test needs; its error says how to get it.
func findPrograms() (p programs, err error) {
	var missing []string
	look := func(name string) string {
		path, err := exec.LookPath(name)
		if err != nil {
			missing = append(missing, name)
		}
		return path
	}
	p.patroni, p.etcd = look("patroni"), look("etcd")
	if out, err := exec.Command("pg_config", "--bindir").Output(); err == nil {
		p.bin = strings.TrimSpace(string(out))
	}
	if _, err := os.Stat(filepath.Join(p.bin, "pg_rewind")); p.bin == "" || err != nil { // Debian has pg_config in other packages than the server
		if all, _ := filepath.Glob("/usr/lib/postgresql/*/bin/pg_rewind"); len(all) > 0 {
			p.bin = filepath.Dir(all[len(all)-1])
		} else {
			missing = append(missing, "PostgreSQL's server programs")
		}
	}
	if len(missing) > 0 {
		return p, fmt.Errorf("missing: %s. On Debian: apt-get install patroni etcd-server postgresql", strings.Join(missing, ", "))
	}
	if os.Geteuid() == 0 {
		p.account, err = unprivileged()
	}
	return p, err
}

// unprivileged is the account that runs the servers for root, whom PostgreSQL refuses.
func unprivileged() (*syscall.Credential, error) {
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uidErr := strconv.ParseUint(u.Uid, 10, 32)
		gid, gidErr := strconv.ParseUint(u.Gid, 10, 32)
		if uidErr == nil && gidErr == nil {
			return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
		}
	}
	return nil, errors.New("PostgreSQL refuses to run as root, and there is no user postgres or nobody")
}

// folder makes a directory that the account may write.
func (p programs) folder(path string) error {
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	if p.account == nil {
		return nil
	}
	return os.Chown(path, int(p.account.Uid), int(p.account.Gid))
}

// start starts a program in a directory, as the account, with what it says in a file
// there. Ctrl-C in the terminal is for this process alone.
func (p programs) start(dir, log, name string, args ...string) (*exec.Cmd, error) {
	out, err := os.OpenFile(filepath.Join(dir, log), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer out.Close() // the child has it
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, out, out
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "LC_ALL=C.UTF-8", "TZ=UTC"} // nothing of PG*, PATRONI_*, ETCD_*
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: p.account}
	return cmd, cmd.Start()
}
