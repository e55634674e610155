package main

import (
	"bytes"
	"errors"
	"flag"
	"strings"
	"testing"
)

func TestFlagsAndEnvironment(t *testing.T) {
	t.Setenv("DATABASE_URL", "postgres://from-the-environment/")
	t.Setenv("BUSINESS_ZONE", "")
	c, err := parseFlags(nil, &bytes.Buffer{})
	if err != nil || c.databaseURL != "postgres://from-the-environment/" || c.zone.String() != "Asia/Seoul" || c.addr != "127.0.0.1:0" {
		t.Errorf("%+v, %v", c, err)
	}
	t.Setenv("BUSINESS_ZONE", "Europe/Berlin")
	c, err = parseFlags(strings.Fields("-database-url postgres://by-flag/"), &bytes.Buffer{})
	if err != nil || c.databaseURL != "postgres://by-flag/" || c.zone.String() != "Europe/Berlin" {
		t.Errorf("%+v, %v", c, err)
	}
	if c, err = parseFlags(strings.Fields("-zone Asia/Tokyo"), &bytes.Buffer{}); err != nil || c.zone.String() != "Asia/Tokyo" {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestBadFlagsAreRefusedBeforeAnythingStarts(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"-zone=", `-zone "": want the name of a time zone`}, // time.LoadLocation would say UTC
		{"-zone=Asia/Nowhere", `-zone "Asia/Nowhere": want`},
		{"-zone=Local", `-zone "Local": want`}, // of the host, whatever that is
		{"-grace=-1s", "-grace is -1s, allowed: 0 or more"},
		{"-grace=soon", "invalid value"},
		{"now", `unexpected argument "now"`},
		{"-demo -database-url=postgres://localhost/shop", "-demo writes runs that never happened"},
	} {
		if _, err := parseFlags(strings.Fields(c.args), &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.args, err, c.want)
		}
	}
	var help bytes.Buffer
	if _, err := parseFlags([]string{"-help"}, &help); !errors.Is(err, flag.ErrHelp) || !strings.Contains(help.String(), "Exit codes") {
		t.Errorf("-help: %v, printed %s", err, &help)
	}
}
