"""How measurements speak while they run: plain lines on a console, nothing read into them."""

from rich.console import Console

from zerolayer.bench.server_process import Progress


def lines_on(console: Console) -> Progress:
    """Prints one line as it is: brackets stay brackets, numbers get no colour."""

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    return say
