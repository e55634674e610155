package main

import (
	"fmt"
	"net/http"
	"sync"
)

// receiver stands for a provider of mail or payments. The first request with a key
// sends a message; a repeat gets the same answer and is dropped.
type receiver struct {
	mu    sync.Mutex
	byKey map[string]string // message
	got   map[string]tally  // by customer
	sent  int
}

// tally counts requests, and what became of them.
type tally struct{ requests, dropped, sent int }

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	key, customer := req.Header.Get("Idempotency-Key"), req.PostFormValue("customer")
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.got[customer]
	t.requests++
	message, repeat := r.byKey[key]
	if repeat {
		t.dropped++
	} else {
		t.sent++
		r.sent++
		message = fmt.Sprintf("message-%d", r.sent)
	}
	if key != "" {
		r.byKey[key] = message
	}
	r.got[customer] = t
	fmt.Fprintf(w, "%s", message)
}
