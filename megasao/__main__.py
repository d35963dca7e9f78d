"""``python -m megasao``."""

from megasao.cli import main

if __name__ == "__main__":
    main()
