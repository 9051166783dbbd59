"""Reading data: files and hub data sets as rows, public formats as records, splits by prompt, and a resumable order of rows."""
