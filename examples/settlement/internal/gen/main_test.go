package main

import (
	"bytes"
	"os"
	"testing"
)

func TestCommittedOrdersAreReproducible(t *testing.T) {
	committed, err := os.ReadFile("../../orders.csv")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(committed, orders()) {
		t.Error("orders.csv is not what gen writes; run: go generate ./examples/settlement")
	}
}
