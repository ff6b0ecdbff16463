# tests: tools/console/libraries.py
"""Tests that texts of strangers do not command the terminal, and that pipes get them unchanged."""

import os
import pty
import subprocess
import sys

from lingvo_gshard.tools.console.libraries import harmless

# Sets the title, clears the screen, asks for the cursor's position, and one of C1 (CSI).
ATTACK = "a\x1b]0;mine\x07b\x1b[2Jc\x1b[6nd\x9be\tf"
SHOWN = "a\\x1b]0;mine\\x07b\\x1b[2Jc\\x1b[6nd\\x9be\tf"
WRITE = f"from lingvo_gshard.tools.console import line_command; line_command.write({ATTACK!r})"
WARN = f"from lingvo_gshard.tools.console import libraries; libraries.warn({ATTACK!r})"


def on_a_terminal(code):
    """Returns what a program writes to a terminal."""
    leader, follower = pty.openpty()
    run = subprocess.run([sys.executable, "-c", code], stdout=follower, stderr=follower)
    os.close(follower)
    assert run.returncode == 0
    found = os.read(leader, 1000).decode()
    os.close(leader)
    return found


def test_every_control_character_but_tab_and_line_break_is_escaped():
    commands = {*range(0x20), 0x7F, *range(0x80, 0xA0)} - {9, 10}
    for code in range(0x180):
        expected = f"\\x{code:02x}" if code in commands else chr(code)
        assert harmless(chr(code)) == expected
    assert harmless("Ünïcode \N{CJK UNIFIED IDEOGRAPH-4E00}\n") == "Ünïcode \u4e00\n"


def test_a_terminal_gets_no_commands_and_a_pipe_the_text_as_it_is():
    assert on_a_terminal(WRITE) == SHOWN
    piped = subprocess.run([sys.executable, "-c", WRITE], capture_output=True, check=True).stdout
    assert piped.decode() == ATTACK


def test_warnings_have_no_commands():
    assert on_a_terminal(WARN) == SHOWN + "\r\n"
