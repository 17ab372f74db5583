# Holds outputs open for commands, until its input ends.
printf '@MARK@o %s\n' "$$"
read -r -d ''
