# Completes gshard-* commands in bash. Written by: gshard-completion bash
_gshard_flags() {
  case $1 in
@flags@
  esac
}

_gshard_words() {
  case $1 in
@words@
  esac
}

_gshard_values() {
  case $1 in
@values@
    *) return 1 ;;
  esac
}

_gshard() {
  local command=${COMP_WORDS[0]##*/} word=${COMP_WORDS[COMP_CWORD]}
  local before=${COMP_WORDS[COMP_CWORD-1]} flag="" prefix="" offered
  # Where = breaks words, --flag=value is three of them.
  if [[ $word == "=" ]]; then
    flag=$before word=""
  elif [[ $before == "=" ]]; then
    flag=${COMP_WORDS[COMP_CWORD-2]}
  elif [[ $word == --*=* ]]; then
    flag=${word%%=*} prefix=$flag= word=${word#*=}
  fi
  COMPREPLY=()
  if [[ -n $flag ]]; then
    if offered=$(_gshard_values "$flag"); then
      mapfile -t COMPREPLY < <(compgen -P "$prefix" -W "$offered" -- "$word")
    else
      compopt -o filenames
      mapfile -t COMPREPLY < <(compgen -P "$prefix" -f -- "$word")
    fi
  elif [[ $word == -* ]]; then
    offered=$(_gshard_flags "$command ${COMP_WORDS[1]}")
    mapfile -t COMPREPLY < <(compgen -W "$offered" -- "$word")
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
  else
    offered=$(_gshard_words "$command")
    if [[ $COMP_CWORD == 1 && -n $offered ]]; then
      mapfile -t COMPREPLY < <(compgen -W "$offered" -- "$word")
    else
      compopt -o filenames
      mapfile -t COMPREPLY < <(compgen -f -- "$word")
    fi
  fi
}

complete -F _gshard @commands@
