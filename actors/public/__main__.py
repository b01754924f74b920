"""``python -m kvalet``."""

from kvalet.actors.cli import main

if __name__ == "__main__":
    main()
