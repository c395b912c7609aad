"""All verbs, in the order of the help, one file each."""

from __future__ import annotations

from homeostat.cli import (
    check,
    clinic,
    doctor,
    env,
    estimate,
    explain,
    inspect,
    rules,
    scaffold,
    schema,
    train,
)
from homeostat.cli.app import new_app

app = new_app()
app.command()(train.train)
app.command()(check.check)
app.command()(estimate.estimate)
app.command()(doctor.doctor)
app.command()(explain.explain)
app.command()(rules.rules)
app.command()(inspect.inspect)
app.command()(clinic.clinic)
app.command()(env.env)
app.command()(scaffold.scaffold)
app.command()(schema.schema)
