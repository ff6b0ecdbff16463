#compdef @commands@
# Completes gshard-* commands in zsh. Written by: gshard-completion zsh
_gshard() {
  local -a specs
  case "${words[1]:t} ${words[2]}" in
@cases@
  esac
  _arguments $specs
}

if [[ $funcstack[1] == _gshard ]]; then
  _gshard "$@"
else
  compdef _gshard @commands@
fi
