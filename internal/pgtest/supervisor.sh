# The parent of a throw-away PostgreSQL.
#
# Arguments: temporary directory, directory of the programs, keep (true or false), arguments of postgres...
# Descriptor 3 is the read end of a pipe that only the test process holds. A line on it is a port to serve at; while
# the server runs, a line stops it. The end of the pipe, however the test process ended, stops it and removes all.
# Output: "dir D", "ready" or "failed" (initdb), then for each port "pid P" and "exit STATUS".

tmp=$1 bin=$2 keep=$3
shift 3
trap : HUP INT TERM # the end of the pipe ends this script, nothing else
trap : PIPE         # once the test process is gone nobody reads the output
umask 077

dir=$(mktemp -d "$tmp/jobrun-pg.XXXXXX" 2>/dev/null || mktemp -d /tmp/jobrun-pg.XXXXXX) || exit 1
echo "dir $dir"

init() {
	"$bin/initdb" -D "$dir/data" -U postgres --auth=trust --encoding=UTF8 --locale="$1" --no-sync >>"$dir/log" 2>&1 </dev/null 3<&-
}
if init C.UTF-8 || init C; then # not every system has C.UTF-8
	echo ready
else
	echo failed
fi

# stop waits for a word from the test process and stops the server: fast, after 10 s at once, after 15 s by force.
stop() {
	read -r _ <&3 || [ "$keep" = false ] || return
	kill -INT "$pid"
	n=0
	while kill -0 "$pid"; do
		n=$((n + 1))
		[ $n = 200 ] && kill -QUIT "$pid"
		[ $n = 300 ] && kill -KILL "$pid"
		sleep 0.05
	done
}

while read -r port <&3; do
	"$bin/postgres" -D "$dir/data" -p "$port" "$@" >>"$dir/log" 2>&1 </dev/null 3<&- &
	pid=$!
	echo "pid $pid"
	stop >/dev/null 2>&1 &
	stopper=$!
	while
		wait "$pid"
		status=$?
		kill -0 "$pid" 2>/dev/null
	do :; done # a signal interrupted the wait
	{
		kill -KILL "$stopper" # a TERM could be lost while it still has our traps
		wait "$stopper"       # until it is dead it may read what is meant for us
	} 2>/dev/null
	echo "exit $status"
done
rm -rf "$dir"
