#!/bin/sh
# What Serve starts instead of HAProxy: the same program ($OUTRIDER_HAPROXY) without splice(), and with the
# configuration of haproxy_config.py. HAProxy 2.8 does not hear that a client has left once it has spliced its request (a
# body that came after its headers, as most clients send it): the answer is generated for nobody, and a thread of HAProxy
# spins until it is complete. Beside it run certificate_watch.py, where there is TLS,
# and standby.py, which starts it again where it has died. While one stands in, the next takes over the listening sockets
# (-x): with Ray's -dR it could not bind their ports, and no connection that waits to be accepted is lost.
if [ ! -x "$OUTRIDER_HAPROXY" ] || [ "$OUTRIDER_HAPROXY" -ef "$0" ]; then
    echo "OUTRIDER_HAPROXY is '$OUTRIDER_HAPROXY', and must be the path of HAProxy's own program; 'outrider env' prints it" >&2
    exit 1
fi
if [ ! -x "$OUTRIDER_PYTHON" ]; then
    echo "OUTRIDER_PYTHON is '$OUTRIDER_PYTHON', and must be the path of Outrider's Python; 'outrider env' prints it" >&2
    exit 1
fi
umask 077
here=$(dirname "$0")
previous= configuration= is_check= reuse=
for argument; do
    [ "$previous" = -f ] && configuration=$argument
    [ "$argument" = -c ] && is_check=1
    [ "$argument" = -dR ] && reuse=-dR
    previous=$argument
done
if [ -n "$configuration" ] && [ -z "$OUTRIDER_STANDS_IN" ]; then
    stand_in=
    [ -z "$is_check" ] && stand_in=$("$OUTRIDER_PYTHON" -I -S "$here/standby.py" "$configuration")
    PYTHONPATH="$here/../.." "$OUTRIDER_PYTHON" -P -s -S -m cluster.proxy.haproxy_config "$configuration" \
        $([ -n "$stand_in" ] && echo has-stand-in) || exit 1
    [ -n "$stand_in" ] && set -- "$@" -x "$stand_in"
fi
if [ -n "$OUTRIDER_TLS_CERTIFICATE" ] && [ -n "$configuration" ] && [ -z "$is_check" ]; then
    "$OUTRIDER_PYTHON" -I -S "$here/certificate_watch.py" "$configuration" $$ \
        </dev/null >/dev/null 2>>"$(dirname "$configuration")/certificates.log" &
fi
if [ -z "$OUTRIDER_STANDS_IN" ] && [ -n "$configuration" ] && [ -z "$is_check" ]; then
    "$OUTRIDER_PYTHON" -I -S "$here/standby.py" "$configuration" $$ "$0" -db -f "$configuration" $reuse \
        </dev/null >/dev/null 2>&1 &
fi
exec "$OUTRIDER_HAPROXY" -dS "$@"
