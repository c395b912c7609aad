"""A local web page over run folders, ours and those of other frameworks: `homeostat dashboard`.

    shelf.py        the runs of the given folders, each read and judged when it is asked for
    curves.py       series of any length as the few points that a plot can show
    samples.py      completions: found, sorted, and their tokens with log-prob differences
    answers.py      what the page asks for, as plain values for JSON
    app.py          the paths of the server, and who may ask
    static/         the page itself, and the library that draws curves

Everything is read from disk: nothing here changes a run.
"""
