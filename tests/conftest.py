"""What holds for all tests: signals mean what they do in a terminal, wherever tests are run from."""

import signal

# A shell has what it starts in the background ignore Ctrl-C, nohup the end of the terminal, and the scripts
# that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
