"""The version of ms_kungfu, for whatever writes it into a file; users read it as ``ms_kungfu.__version__``."""

VERSION = "0.1.0"
