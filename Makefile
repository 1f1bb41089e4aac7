PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: report test lint lab clean

report: $(READY)  ## run the live campaign, render every notebook, print the path of index.html
	$(BIN)/python -m pmlkit report notebooks/10_run_campaign.ipynb
	$(BIN)/python -m pmlkit report --all

test: $(READY)  ## run the tests that need no GPU
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

lab: $(READY)  ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab notebooks

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[peers,dev]'
	touch $@

clean:
	rm -rf $(VENV) data/reports
