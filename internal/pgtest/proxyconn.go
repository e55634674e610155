package pgtest

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"
)

// Codes that stand in place of a protocol version in the first message of a connection.
const (
	sslRequest = 80877103
	gssRequest = 80877104
)

// errStruck ends a direction whose connection was cut.
var errStruck = errors.New("cut")

// A proxyConn is one connection through a Proxy: a goroutine for each direction passes message by message.
type proxyConn struct {
	proxy          *Proxy
	client, server net.Conn

	// Of the goroutine that reads from the client.
	prepared map[string]string // statement name => SQL, in lower case
	portals  map[string]string // portal name => SQL

	// Each Query, Sync, FunctionCall, and the startup, is a request: the server ends its answer to each with one
	// ReadyForQuery. Guarded by proxy.mu.
	asked int           // requests passed on
	cutAt int           // the request whose answer is dropped, and the connection cut after it; 0: none
	held  chan struct{} // not nil: nothing passes until it is closed
}

// end closes both sides after one direction has ended, however it did: that of the other ends too.
func (c *proxyConn) end(error) {
	c.proxy.mu.Lock()
	defer c.proxy.mu.Unlock()
	c.proxy.drop(c)
}

// release ends a hold. The caller holds proxy.mu.
func (c *proxyConn) release() {
	if c.held != nil {
		close(c.held)
		c.held = nil
	}
}

// waitDelayed waits as long as every message does.
func (c *proxyConn) waitDelayed() {
	c.proxy.mu.Lock()
	delay := c.proxy.delay
	c.proxy.mu.Unlock()
	if delay > 0 {
		time.Sleep(delay)
	}
}

// waitHeld returns when nothing holds the connection.
func (c *proxyConn) waitHeld() {
	c.proxy.mu.Lock()
	held := c.held
	c.proxy.mu.Unlock()
	if held != nil {
		<-held
	}
}

func (c *proxyConn) fromClient() error {
	r := bufio.NewReader(c.client)
	if err := c.startup(r); err != nil {
		return err
	}
	for {
		msg, err := readMessage(r)
		c.waitDelayed()
		c.waitHeld() // before the end of the client, too
		if err != nil {
			return err
		}
		sql, executes := c.statement(msg)
		pass, err := c.inspect(msg[0], sql, executes)
		if err != nil {
			return err
		}
		if !pass {
			continue
		}
		c.waitHeld() // a hold that this message set off
		if _, err := c.server.Write(msg); err != nil {
			return err
		}
		if executes {
			c.count(sql)
		}
	}
}

// startup passes the first message, which has no type byte: a StartupMessage or a CancelRequest, after a refusal of
// encryption if the client asks for it.
func (c *proxyConn) startup(r *bufio.Reader) error {
	for {
		msg, err := readBody(r, nil)
		if err != nil {
			return err
		}
		if len(msg) < 8 {
			return errors.New("short startup message")
		}
		if code := binary.BigEndian.Uint32(msg[4:]); code == sslRequest || code == gssRequest {
			if _, err := c.client.Write([]byte("N")); err != nil {
				return err
			}
			continue
		}
		c.proxy.mu.Lock()
		c.asked++ // a CancelRequest has no answer, but nothing follows it either
		c.proxy.mu.Unlock()
		_, err = c.server.Write(msg)
		return err
	}
}

// inspect says whether to pass a message of the client, and applies the fault that it sets off.
func (c *proxyConn) inspect(kind byte, sql string, executes bool) (pass bool, err error) {
	p := c.proxy
	p.mu.Lock()
	defer p.mu.Unlock()

	copying := kind == 'd' || kind == 'c' || kind == 'f' // CopyData, CopyDone, CopyFail belong to a request before
	if c.cutAt > 0 && c.asked >= c.cutAt && !copying {
		return false, nil // the request to cut after was the last
	}
	if sql != "" {
		switch p.strike(sql, executes) {
		case cutBefore:
			p.cut(c)
			return false, errStruck
		case cutAfter:
			if c.cutAt == 0 {
				c.cutAt = c.asked + 1 // this Query, or the Sync that follows this Execute
			}
		case hold:
			if p.conns[c] { // else it was closed meanwhile
				c.held = make(chan struct{})
			}
		}
	}
	if kind == 'Q' || kind == 'S' || kind == 'F' {
		c.asked++
		p.requests++
	}
	return true, nil
}

// statement returns the SQL that the message is about in lower case, "" if none, and whether it executes it.
func (c *proxyConn) statement(msg []byte) (sql string, executes bool) {
	switch body := msg[5:]; msg[0] {
	case 'Q': // Query
		sql, _ = cutString(body)
		return strings.ToLower(sql), true
	case 'P': // Parse
		name, rest := cutString(body)
		sql, _ = cutString(rest)
		c.prepared[name] = strings.ToLower(sql)
		return c.prepared[name], false
	case 'B': // Bind
		portal, rest := cutString(body)
		name, _ := cutString(rest)
		c.portals[portal] = c.prepared[name]
		return c.portals[portal], false
	case 'E': // Execute
		portal, _ := cutString(body)
		return c.portals[portal], true
	}
	return "", false
}

// count counts an execution that was passed on.
func (c *proxyConn) count(sql string) {
	c.proxy.mu.Lock()
	defer c.proxy.mu.Unlock()
	c.proxy.statements[sql]++
}

func (c *proxyConn) fromServer() error {
	r := bufio.NewReader(c.server)
	for answered := 0; ; {
		msg, err := readMessage(r)
		c.waitDelayed()
		c.waitHeld()
		if err != nil {
			return err
		}
		if msg[0] == 'Z' { // ReadyForQuery
			answered++
		}
		pass, err := c.inspectAnswer(msg[0], answered)
		if err != nil {
			return err
		}
		if !pass {
			continue
		}
		if _, err := c.client.Write(msg); err != nil {
			return err
		}
	}
}

// inspectAnswer says whether to pass a message of the server, after which so many requests are answered, and cuts the
// connection when the answer to be dropped has come to its end.
func (c *proxyConn) inspectAnswer(kind byte, answered int) (pass bool, err error) {
	p := c.proxy
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case c.cutAt == 0:
		return true, nil
	case answered >= c.cutAt:
		p.cut(c)
		return false, errStruck
	case answered == c.cutAt-1 && kind != 'Z': // of the answer to be dropped
		return kind == 'G' || kind == 'H' || kind == 'W', nil // but without CopyResponse the client sends no data
	}
	return true, nil
}

// readMessage reads a message whole: a type byte, the length of the rest, the body.
func readMessage(r *bufio.Reader) ([]byte, error) {
	kind, err := r.ReadByte()
	if err != nil {
		return nil, err
	}
	return readBody(r, []byte{kind})
}

// readBody appends a length and what it counts, itself included, to the message.
func readBody(r *bufio.Reader, msg []byte) ([]byte, error) {
	var length [4]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return nil, err
	}
	n := int64(binary.BigEndian.Uint32(length[:]))
	if n < 4 {
		return nil, fmt.Errorf("message of %d bytes", n)
	}
	b := bytes.NewBuffer(append(msg, length[:]...))
	_, err := io.CopyN(b, r, n-4) // grows with what arrives, whatever the length claims
	return b.Bytes(), err
}

// cutString splits off a string that ends in a zero byte.
func cutString(b []byte) (string, []byte) {
	s, rest, _ := bytes.Cut(b, []byte{0})
	return string(s), rest
}
