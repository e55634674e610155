//go:build linux

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"
)

// What a worker was told, or did.
const (
	started  = "started"  // the function of an attempt was called: the claim is acknowledged
	returned = "returned" // that function is about to return
	outcome  = "outcome"  // RunDate, RetryDue or Complete said how the attempt ended, and that it is recorded
	seen     = "seen"     // a call said ALREADY_SUCCEEDED
	unknown  = "unknown"  // a call said that the outcome could not be recorded: a person decides
	items    = "items"    // Each or Complete said that these items are done
	tried    = "tried"    // all keys below this number were tried
)

// note is a line of a worker's file.
type note struct {
	What    string    `json:"what"`
	At      time.Time `json:"at"`
	Key     string    `json:"key,omitempty"`
	Attempt int       `json:"attempt,omitempty"`
	Worker  string    `json:"worker,omitempty"`
	Status  string    `json:"status,omitempty"`
	First   int       `json:"first,omitempty"` // of items
	Last    int       `json:"last,omitempty"`
	Number  int       `json:"number,omitempty"` // of keys
}

// notebook is a worker's file.
type notebook struct {
	mu   sync.Mutex
	file *os.File
}

func newNotebook(name string) (*notebook, error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	return &notebook{file: f}, err
}

// write returns when the line is on disk. A process that cannot do so ends: what it
// goes on to do would not be judged.
func (b *notebook) write(n note) {
	if n.At.IsZero() {
		n.At = time.Now()
	}
	line, err := json.Marshal(n)
	b.mu.Lock()
	defer b.mu.Unlock()
	if err == nil {
		_, err = b.file.Write(append(line, '\n'))
	}
	if err == nil {
		err = b.file.Sync()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "notebook:", err)
		os.Exit(3)
	}
}

// readNotes reads a worker's file.
func readNotes(name string) (all []note, err error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var n note
		if err := json.Unmarshal(lines.Bytes(), &n); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		all = append(all, n)
	}
	return all, lines.Err()
}
