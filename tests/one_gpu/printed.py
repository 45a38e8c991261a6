"""What is read from the output of a command."""

import json
import re


def last_line(output):
    """The last line that names an error; if none does, the last line."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [
        line
        for line in lines
        if re.search(r"\w(Error|Exception)\b.*: ", line) and "ChildFailedError" not in line
    ]
    return (errors or lines or ["nothing printed"])[-1][-300:]


def warnings_in(output):
    """The lines that warn, without torchrun's note about threads."""
    return sorted(
        {
            line
            for line in output.splitlines()
            if re.search("warn|deprecat", line, re.IGNORECASE) and "OMP_NUM" not in line
        }
    )


def digest(output):
    """The checksum of the weights, with which 02 and the template end."""
    return re.findall(r"identical, sha256 (\w+)$", output, re.MULTILINE)[-1]


def accuracy(output):
    """The last accuracy, 0 to 1."""
    return float(re.findall(r"accuracy ([\d.]+)", output)[-1])


def synchronisations_in(output):
    """What the setting "syncs" of inside/run_script.py counted, {line: times}; {} if nothing."""
    counted = re.findall(r"SYNCS (.*)$", output, re.MULTILINE)
    return json.loads(counted[-1]) if counted else {}


def tables_of(output):
    """The tables of a benchmark, {title: {row: its numbers}}, from the line of JSON it prints."""
    result = json.loads(re.findall(r"^\{.*\}$", output, re.MULTILINE)[-1])
    return {
        table["title"]: {name_of(row): numbers_of(row) for row in table["rows"]}
        for table in result["tables"]
    }


def name_of(row):
    """The texts of a row; its first number, if it has none."""
    return " ".join(cell for cell in row if isinstance(cell, str)) or str(row[0])


def numbers_of(row):
    return [round(cell, 3) for cell in row if isinstance(cell, int | float)]
