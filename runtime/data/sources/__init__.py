"""One file per kind of data source; `open_source` turns a blueprint's entry into documents."""
