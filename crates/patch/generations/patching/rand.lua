-- For sysbench: prints what RAND() answers.
function thread_init()
  connection = sysbench.sql.driver():connect()
end

function event()
  print("RAND() is " .. connection:query_row("SELECT RAND()"))
end
