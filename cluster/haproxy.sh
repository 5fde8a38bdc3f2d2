#!/bin/sh
# What Serve starts instead of HAProxy: the same program ($OUTRIDER_HAPROXY) without splice(). HAProxy 2.8 does not hear
# that a client has left once it has spliced its request (a body that came after its headers, as most clients send it):
# the answer is generated for nobody, and a thread of HAProxy spins until it is complete.
exec "$OUTRIDER_HAPROXY" -dS "$@"
