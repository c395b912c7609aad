"""Turn the config or launch script of another framework into one of our recipes.

    reading      a file -> its settings: YAML, shell script or Python script; nothing is executed
    recognise    which framework a file belongs to
    convert      settings -> keys of a recipe, by the tables of health/frameworks
    fitting      leave out what the recipe's own checks refuse; say which keys are still needed
    render       the recipe as YAML with comments, and the list of what became of each setting
    hints        errors about a recipe that name our keys for other frameworks' names

Which setting means which key is written in health/frameworks alone. Here are only the rules that a
table cannot hold: units, choices, and sizes that follow from several settings.
"""
