"""A writer of CSV files: a line for each interval, a file for each behavior."""

import csv

from sparring.pipeline.monitoring.writers import Event, RunInfo, Writer, WriterSettings


class CsvSettings(WriterSettings):
    """Section `writers.csv`; `sparring check` knows its keys, and names the line of one that is wrong.

    Attributes:
        columns: names of the numbers, as in TensorBoard.
    """

    columns: tuple[str, ...] = ("Environment/Cumulative Reward", "Policy/Entropy")


class CsvWriter(Writer):
    """Writes `csv/BEHAVIOR.csv` in the folder of the run."""

    settings_model = CsvSettings
    settings: CsvSettings

    def open(self, run: RunInfo) -> None:
        self.folder = run.folder / "csv"
        self.folder.mkdir(exist_ok=True)

    def write(self, event: Event) -> None:
        if event.kind == "interval":
            numbers = event.scalars
            row = [event.values["step"], *(numbers.get(name, "") for name in self.settings.columns)]
            with (self.folder / f"{event.values['behavior']}.csv").open("a", newline="") as file:
                csv.writer(file).writerow(row)
