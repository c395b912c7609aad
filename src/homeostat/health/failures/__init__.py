"""Read how a program failed: tracebacks, crashes, errors without frames, last lines."""
