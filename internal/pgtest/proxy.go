package pgtest

import (
	"maps"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// A Proxy stands between a program and its database and breaks connections where a test wants it. It reads enough of
// the wire protocol to know which statement a message is about, whichever of pgx's exec modes sent it. A match is a
// part of the statement's SQL, in upper or lower case; after a ^ it is the beginning, so that ^commit is no setting's name. A fault that is armed strikes once, on whichever connection
// comes first, unless it says otherwise. All methods may be called at any time from any goroutine.
type Proxy struct {
	listener         net.Listener
	network, address string // of the server
	url              string
	wait             sync.WaitGroup // for every goroutine

	mu         sync.Mutex
	closed     bool
	refuse     bool
	delay      time.Duration
	faults     []*fault
	conns      map[*proxyConn]bool
	cuts       int
	requests   int
	struck     map[string]int // "cut before", "cut after" or "hold", a space and the match => times
	statements map[string]int // SQL in lower case => executions that were forwarded
}

type faultKind int

const (
	none faultKind = iota
	cutBefore
	cutAfter
	hold
)

func (k faultKind) String() string { return [...]string{"none", "cut before", "cut after", "hold"}[k] }

type fault struct {
	kind  faultKind
	match string // in lower case
	left  int
}

// NewProxy is StartProxy for a test, with which it ends.
func NewProxy(t testing.TB, dbURL string) *Proxy {
	t.Helper()
	p, err := StartProxy(dbURL)
	if err != nil {
		t.Fatalf("pgtest: proxy: %v", err)
	}
	t.Cleanup(p.Close)
	return p
}

// StartProxy starts a proxy for the server of the URL, which must accept connections without TLS. The caller calls
// Close at the end.
func StartProxy(dbURL string) (*Proxy, error) {
	config, err := pgconn.ParseConfig(dbURL)
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(dbURL)
	if err != nil {
		return nil, err
	}
	p := &Proxy{conns: map[*proxyConn]bool{}, struck: map[string]int{}, statements: map[string]int{}}
	p.network, p.address = pgconn.NetworkAddress(config.Host, config.Port)
	p.listener, err = net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	query := u.Query()
	query.Set("sslmode", "disable")
	u.Host, u.RawQuery = p.listener.Addr().String(), query.Encode()
	p.url = withoutParameters(u, "host", "port")

	p.wait.Go(p.accept)
	return p, nil
}

// URL returns the URL of the database through the proxy.
func (p *Proxy) URL() string { return p.url }

// CutBefore arms a cut: the next message about a matching statement does not reach the server, and both sides of the
// connection are closed.
func (p *Proxy) CutBefore(match string) { p.CutBeforeN(match, 1) }

// CutBeforeN is CutBefore for the next n times.
func (p *Proxy) CutBeforeN(match string, n int) { p.arm(cutBefore, match, n) }

// CutAfter arms a cut: the next matching statement is executed, but once the server has answered (so that what it
// committed is committed) the answer is dropped and both sides of the connection are closed.
func (p *Proxy) CutAfter(match string) { p.CutAfterN(match, 1) }

// CutAfterN is CutAfter for the next n times.
func (p *Proxy) CutAfterN(match string, n int) { p.arm(cutAfter, match, n) }

// Hold arms a silence: from the next message about a matching statement on, that one included, nothing passes on its
// connection in either direction, not even its end, until Release.
func (p *Proxy) Hold(match string) { p.arm(hold, match, 1) }

// Release lets everything that is held pass, and disarms Holds that have not struck.
func (p *Proxy) Release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.release()
	}
	p.faults = slices.DeleteFunc(p.faults, func(f *fault) bool { return f.kind == hold })
}

// Disarm forgets the faults that have not struck.
func (p *Proxy) Disarm() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = nil
}

// Held returns how many connections are held now.
func (p *Proxy) Held() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for c := range p.conns {
		if c.held != nil {
			n++
		}
	}
	return n
}

// RefuseNew makes the proxy close new connections at once, or accept them again. Those that exist go on.
func (p *Proxy) RefuseNew(refuse bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refuse = refuse
}

// Delay makes every message in either direction wait for d before it passes; 0: none does any more.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// CutAll closes all connections.
func (p *Proxy) CutAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		p.cut(c)
	}
}

// Cuts returns how many connections CutBefore, CutAfter and CutAll have closed.
func (p *Proxy) Cuts() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cuts
}

// Struck returns how often each fault that was armed has struck, by its kind ("cut before", "cut after", "hold"), a space
// and its match in lower case.
func (p *Proxy) Struck() map[string]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.struck)
}

// Statements returns how many executions of matching statements have been passed on to the server.
func (p *Proxy) Statements(match string) int {
	match = strings.ToLower(match)
	p.mu.Lock()
	defer p.mu.Unlock()
	total := 0
	for sql, n := range p.statements {
		if matches(sql, match) {
			total += n
		}
	}
	return total
}

// Requests returns how many requests of the clients have been passed on to the server: each asks for an answer, and is
// a round trip of a client that waits for it.
func (p *Proxy) Requests() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.requests
}

func (p *Proxy) arm(kind faultKind, match string, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n > 0 {
		p.faults = append(p.faults, &fault{kind, strings.ToLower(match), n})
	}
}

// strike returns the fault that hits a message about the SQL, and uses it up. Only a message that executes the
// statement can be cut after.
func (p *Proxy) strike(sql string, executes bool) faultKind {
	for i, f := range p.faults {
		if (executes || f.kind != cutAfter) && matches(sql, f.match) {
			if f.left--; f.left == 0 {
				p.faults = slices.Delete(p.faults, i, i+1)
			}
			p.struck[f.kind.String()+" "+f.match]++
			return f.kind
		}
	}
	return none
}

// matches reports whether SQL, in lower case, is one that a match means.
func matches(sql, match string) bool {
	if start, ok := strings.CutPrefix(match, "^"); ok {
		return strings.HasPrefix(sql, start)
	}
	return strings.Contains(sql, match)
}

// cut closes a connection once, on purpose. The caller holds p.mu.
func (p *Proxy) cut(c *proxyConn) {
	if p.conns[c] {
		p.cuts++
		p.drop(c)
	}
}

// drop closes both sides of a connection and forgets it. The caller holds p.mu.
func (p *Proxy) drop(c *proxyConn) {
	delete(p.conns, c)
	c.release()
	c.client.Close()
	c.server.Close()
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return // closed
		}
		p.wait.Go(func() { p.connect(client) })
	}
}

// connect opens the other side and runs the connection.
func (p *Proxy) connect(client net.Conn) {
	if p.refuses() {
		client.Close()
		return
	}
	server, err := net.Dial(p.network, p.address)
	if err != nil {
		client.Close()
		return
	}
	c := &proxyConn{proxy: p, client: client, server: server, prepared: map[string]string{}, portals: map[string]string{}}
	p.mu.Lock()
	if p.closed {
		client.Close()
		server.Close()
	} else {
		p.conns[c] = true
	}
	p.mu.Unlock()

	p.wait.Go(func() { c.end(c.fromServer()) })
	c.end(c.fromClient())
}

func (p *Proxy) refuses() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.refuse || p.closed
}

// Close closes all connections and ends the proxy.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.closed = true
	for c := range p.conns {
		p.drop(c)
	}
	p.mu.Unlock()
	p.listener.Close()
	p.wait.Wait()
}
