"""`python -m ntl_lightning`."""

from ntl_lightning.cli import main

if __name__ == "__main__":
    main()
