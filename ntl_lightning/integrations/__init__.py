"""The losses in other people's training loops: each module serves one library, loaded by itself."""

__all__: list[str] = []
