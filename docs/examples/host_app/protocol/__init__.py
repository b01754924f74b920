"""The host's own package. It is called like one of kvalet's rooms, and the two never meet."""

OWNER = "the host"
