"""All verbs, in the order of the help, one file each."""

from __future__ import annotations

from homeostat.cli import (
    chat,
    check,
    clinic,
    dashboard,
    dev,
    docs,
    doctor,
    env,
    estimate,
    eval,
    explain,
    export,
    generate,
    import_,
    inspect,
    new,
    push,
    rules,
    scaffold,
    schema,
    serve,
    train,
    watch,
)
from homeostat.cli.app import new_app

app = new_app()
app.command()(new.new)
app.command()(train.train)
app.command()(check.check)
app.command()(estimate.estimate)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(serve.serve)
app.command("eval")(eval.eval_)
app.command()(export.export)
app.command()(push.push)
app.command()(doctor.doctor)
app.command()(dashboard.dashboard)
app.command()(watch.watch)
app.command()(explain.explain)
app.command()(rules.rules)
app.command()(inspect.inspect)
app.command()(clinic.clinic)
app.command()(env.env)
app.command()(docs.docs)
app.command("import")(import_.import_)
app.command()(scaffold.scaffold)
app.add_typer(dev.app, name="dev")
app.command()(schema.schema)
