"""Standard input with given bytes."""

import io
import tempfile


class StandardInput(io.TextIOWrapper):
    """Stands for sys.stdin; a file has its bytes."""

    def __init__(self, content: bytes):
        file = tempfile.TemporaryFile()
        file.write(content)
        file.seek(0)
        super().__init__(file)
