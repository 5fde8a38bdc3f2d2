#!/bin/sh
# What Serve starts instead of HAProxy: the same program ($OUTRIDER_HAPROXY) without splice(), and with the
# configuration of haproxy_config.py. HAProxy 2.8 does not hear that a client has left once it has spliced its request (a
# body that came after its headers, as most clients send it): the answer is generated for nobody, and a thread of HAProxy
# spins until it is complete.
if [ ! -x "$OUTRIDER_HAPROXY" ] || [ "$OUTRIDER_HAPROXY" -ef "$0" ]; then
    echo "OUTRIDER_HAPROXY is '$OUTRIDER_HAPROXY', and must be the path of HAProxy's own program (README.md, Configure)" >&2
    exit 1
fi
umask 077
previous=
for argument; do
    if [ "$previous" = -f ]; then
        "$OUTRIDER_PYTHON" -I -S "$(dirname "$0")/haproxy_config.py" "$argument" || exit 1
    fi
    previous=$argument
done
exec "$OUTRIDER_HAPROXY" -dS "$@"
