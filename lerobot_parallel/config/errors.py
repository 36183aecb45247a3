"""What a user can fix, said on one line."""


class ConfigError(ValueError):
    """A refusal: one line that names the flag, the value and the way out.

    Raised before a process group, a dataset or a GPU is touched wherever that is possible, and alike on
    every rank; the command prints it once for the whole world and exits with 1, without a traceback.
    """

    def __init__(self, flag: str, value: object, problem: str, way_out: str) -> None:
        text = f"{flag}={value}: {problem}; {way_out}"
        super().__init__(" ".join(text.split()))
        self.flag = flag
        self.problem = problem
