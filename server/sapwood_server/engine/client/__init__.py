"""The API process's end of the socket: it starts and watches the engine process, and streams its events. No torch."""
